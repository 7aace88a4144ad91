"""How passes run: functions of tensors, and their eager, compiled and captured form."""
