"""Pictures of results: allocations, comparisons, evaluations, predictors, thresholds and kernel times."""
