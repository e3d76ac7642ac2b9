"""The scheduler side's paths: lookup, promotion, cascade, jobs, and the manager that joins them."""
