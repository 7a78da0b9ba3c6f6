"""What runs on the device, each kernel beside its twin in plain torch, of the same signature."""
