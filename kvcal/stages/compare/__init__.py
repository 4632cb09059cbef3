"""Comparison: recipes side by side on one model, at stated budgets."""
