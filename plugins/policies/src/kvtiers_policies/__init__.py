"""kvtiers-policies: the eviction policy turn-hazard, admission by expected reuse, and shadow caches."""
