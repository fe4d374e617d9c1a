"""Data sets, their global order, and the loaders that cut it into the microbatches of a rank."""

from ddp_experiments.data.loader import Batch, Batches, EvaluationBatches, Microbatch
from ddp_experiments.data.order import mix
from ddp_experiments.data.sets import Splits, TensorData

__all__ = ["Batch", "Batches", "EvaluationBatches", "Microbatch", "Splits", "TensorData", "mix"]
