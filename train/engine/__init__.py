"""DeepSpeed behind one interface: optimizer steps, optimizer state, the sharded teacher. No other room imports it."""
