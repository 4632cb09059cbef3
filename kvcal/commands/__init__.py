"""Commands by what they work on: recipes (run), stages of a folder (stages), plans (plans), the GPU runtime and engines
(serve), what needs no model (about). ``options``: what they share."""
