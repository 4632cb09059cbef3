"""Formats within a byte budget: the integer program, its budget, schedules and importance."""
