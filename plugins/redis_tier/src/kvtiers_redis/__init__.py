"""A kvtiers tier that keeps values in Redis, Valkey and their kin: one server, Sentinel or Cluster."""
