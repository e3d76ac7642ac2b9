"""A replay from Python, with results that notebooks show: ``kvtiers.replay(...)``.

It is the command ``kvtiers replay`` as a function: real tiers, real bytes, every byte compared.
"""

import os
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from kvtiers.config import OffloadConfig, load_config
from kvtiers_replay.cli.replay import MADE_UP, default_config, options_of, read_workload
from kvtiers_replay.report.text import heading, tables
from kvtiers_replay.results import Latencies, ReplayResults
from kvtiers_replay.run import replay as run
from kvtiers_replay.sizing import read_model
from kvtiers_replay.workload import Workload

__all__ = ["Replayed", "replay"]

_SCOPE = "kvtiers-replay"


class Replayed:
    """The results of a replay, as a notebook shows them. ``results``: all figures, as plain data."""

    def __init__(self, results: ReplayResults) -> None:
        self.results = results

    @property
    def hit_rate(self) -> float:
        """Prefix hits as a share of the full blocks asked for."""
        return self.results.prefix_hits / max(1, self.results.references)

    def frames(self) -> dict[str, Any]:
        """Return the figures as pandas data frames, by name; ImportError says what to install.

        ``hits``: blocks and share by origin. ``over_time``: each origin's share by seconds since the start. ``links``:
        bytes and seconds by link. ``latencies``: count, p50, p99 and worst in seconds, by what was waited for.
        """
        try:
            import pandas as pd  # type: ignore[import-untyped,unused-ignore]  # an extra
        except ImportError:
            raise ImportError("data frames need pandas: pip install 'kvtiers-replay[frames]'") from None
        results = self.results
        whole = max(1, results.references)
        hits = {name: (count, count / whole) for name, count in results.hits.items()}
        links = {name: (link.nbytes, link.seconds) for name, link in results.links.items()}
        times = {name: _row(each) for name, each in {**results.latencies, "engine's thread": results.stalls}.items()}
        by_row = {"orient": "index"}
        return {
            "hits": pd.DataFrame.from_dict(hits, columns=["blocks", "share"], **by_row),
            "over_time": pd.DataFrame(results.over_time.hit_rates, index=pd.Index(results.over_time.seconds, name="s")),
            "links": pd.DataFrame.from_dict(links, columns=["bytes", "seconds"], **by_row),
            "latencies": pd.DataFrame.from_dict(times, columns=["count", "p50", "p99", "worst"], **by_row),
        }

    def write_page(self, path: str | os.PathLike[str]) -> None:
        """Write the whole report as one HTML file, as ``kvtiers replay --report`` does."""
        from kvtiers_replay.report.page import as_page

        Path(path).write_text(as_page(self.results), encoding="utf-8")

    def __repr__(self) -> str:
        lines = [heading(self.results)]
        for table in tables(self.results):
            lines += ["", *("  ".join(row) for row in [table.columns, *table.rows])]
        return "\n".join([*lines, "", *self.results.verdict])

    def _repr_html_(self) -> str:
        """Return the verdict, where the blocks came from, and the table of hits."""
        from kvtiers_replay.report.charts import hits_over_time, where_blocks_came_from
        from kvtiers_replay.report.drawing import style

        results = self.results
        drawings = [where_blocks_came_from(results)]
        drawings += [hits_over_time(results)] if results.over_time.seconds else []
        rows = "".join(
            f"<tr>{''.join(f'<td>{escape(cell.strip())}</td>' for cell in row)}</tr>" for row in tables(results)[0].rows
        )
        # In a notebook, colours are those of this element alone; its own table style does for the rest.
        colours = style().replace(":root", f".{_SCOPE}").replace(".plot", f".{_SCOPE} .plot")
        verdict = "".join(f"<p>{escape(line)}</p>" for line in results.verdict)
        return (
            f'<div class="{_SCOPE}"><style>{colours}</style><p><b>{escape(heading(results))}</b></p>{verdict}'
            f"{''.join(drawing.svg for drawing in drawings)}<table>{rows}</table></div>"
        )


def _row(times: Latencies) -> tuple[int, float, float, float]:
    return times.count, times.p50, times.p99, times.worst


def replay(
    workload: str | os.PathLike[str] | Workload = "code",
    *,
    config: OffloadConfig | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    requests: int | None = None,
    seed: int = 0,
    model: str | os.PathLike[str] | None = None,
    kv_dtype: str = "auto",
    tp: int = 1,
    bytes_per_chunk: int | None = None,
    workers: int | None = None,
    **options: Any,
) -> Replayed:
    """Drive the whole stack from a workload, check every byte, and return what a notebook shows.

    ``workload``: ``"code"``, ``"agent"`` or ``"rag"``, made up; or the path of a trace; or one that was read.
    ``config``: a file, a mapping or a config; None: a small primary with memory below it. ``model``: a
    ``config.json``, whose bytes a chunk has; else ``bytes_per_chunk``, else those of a small model. ``options``: those
    of ``ReplayOptions``, such as ``concurrency`` and ``gpu_blocks``. ConfigError, one line, for what is wrong.
    """
    if isinstance(workload, Workload):
        load = workload
    else:
        load = (
            read_workload(None, str(workload), requests, seed)
            if workload in MADE_UP
            else read_workload(os.fspath(workload), None, requests, seed)
        )
    shape = read_model(model, kv_dtype=kv_dtype, ranks=tp) if model else None
    chosen = config if isinstance(config, OffloadConfig) else load_config(config) if config else default_config()
    wanted = options_of(load, bytes_per_chunk, shape, workers=workers, **({"blocks_per_chunk": 1} | options))
    return Replayed(run(chosen, load, wanted))
