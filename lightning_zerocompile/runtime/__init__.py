"""The C++ runtime from Python: its build, its operators, its windows and its memory."""
