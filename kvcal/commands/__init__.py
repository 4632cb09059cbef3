"""A file for each command, or for those that work on one thing: whole recipes (run), steps in a folder
(stages). What they share is in ``options`` and ``values``, what they are wrapped in in ``decorators``."""
