"""DeepSpeed behind one interface, and the only room that imports it: optimizer steps, optimizer state, the sharded teacher."""
