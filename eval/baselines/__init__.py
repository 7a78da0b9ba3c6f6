"""Other methods' ways of choosing and fetching, as twins of `DiskSwapCache`: the same store, threads and buffers."""
