"""What decides which units a step needs: pure tensors, no transformers, no disk."""
