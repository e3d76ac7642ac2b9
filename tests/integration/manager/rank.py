"""A rank in a process of its own: joins an engine's region, says so, and lives until it is killed or asked to end."""

import sys

from kvtiers.layout.cache_layout import CacheLayout
from kvtiers.region.client import RegionJoin

engine_id, rank, layout = sys.argv[1], int(sys.argv[2]), CacheLayout.from_json(sys.argv[3])
join = RegionJoin.start(engine_id, layout, rank, start_deadline=60)
join.wait(60)
sys.stdout.write("joined\n")
sys.stdout.flush()
sys.stdin.read()
join.close()
