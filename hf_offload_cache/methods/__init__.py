"""One folder a method: its configuration, predictor, history, layer and cache. No method imports another."""
