"""What a layer holds: entries in records, the latest ones in memory, in an order of its own."""
