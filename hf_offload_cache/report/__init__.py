"""What a cache did: counters, the report, the timeline."""
