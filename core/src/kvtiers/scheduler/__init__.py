"""Which blocks to offload and which prefix to load, for engines that do not bring a scheduler of their own."""
