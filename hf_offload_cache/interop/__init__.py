"""What makes others use a cache of this library: pipelines, servers, whoever calls `generate`."""
