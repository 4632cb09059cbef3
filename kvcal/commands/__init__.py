"""Commands by what they work on: recipes (run), stages of a folder (stages), plans (plans), the GPU runtime
and engines (serve), what needs no model (without_model). ``options``: what they share."""
