"""A run of a recipe: the stages in order, each making one artifact of a folder."""
