"""Pages: what a replay or a plan has found, as one HTML file that needs nothing else, and the plots in it."""

from kvtiers_replay.page.replay_page import as_page

__all__ = ["as_page"]
