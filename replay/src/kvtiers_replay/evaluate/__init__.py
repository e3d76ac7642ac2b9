"""Evaluations: what tiers would save on a request log, in GPU seconds and money, and which do not pay."""

from kvtiers_replay.evaluate.evaluation import Evaluation, Question, evaluate
from kvtiers_replay.evaluate.offers import TIER_TYPES, Offer, TierType

__all__ = ["TIER_TYPES", "Evaluation", "Offer", "Question", "TierType", "evaluate"]
