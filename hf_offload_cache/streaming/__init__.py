"""The network: contexts that were prepared elsewhere, loaded where that is cheap and computed where that is."""
