"""Request logs: files that users have, read as workloads. Prompts are hashed line by line, and none is kept."""

from kvtiers_replay.logs.read import LogKind, Reading, ReadLog, read_log

__all__ = ["LogKind", "ReadLog", "Reading", "read_log"]
