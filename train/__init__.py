"""The training run: configuration, launch, teacher, objective, engine, loop. Importing it is cheap; its modules are not."""
