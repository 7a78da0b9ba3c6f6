"""The account of what is held, and plans of what will be."""
