"""Two figures, and the report that shows them."""
