"""Tracing: OpenTelemetry spans of the lookups, loads and stores of sampled requests. Imported only where it is on."""
