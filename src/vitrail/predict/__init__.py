"""Images in; labels, scores, embeddings and reasons out."""

from vitrail.predict.prediction import Prediction
from vitrail.predict.predictor import Predictor

__all__ = ["Prediction", "Predictor"]
