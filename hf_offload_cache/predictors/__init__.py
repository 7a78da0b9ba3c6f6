"""Predictors, which select the units of a step: only tensors, no transformers, no disk."""

from .base import Decision as Decision
from .base import Learner as Learner
from .base import Predictor as Predictor
from .base import Query as Query
from .sinks import largest as largest
from .sinks import sink_units as sink_units
from .sinks import with_sinks as with_sinks
from .summaries import SummaryPredictor as SummaryPredictor
