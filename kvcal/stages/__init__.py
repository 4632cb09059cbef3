"""The stages of a run, each from artifacts to an artifact, and what else is measured or told of a model and
its plans.

``pipeline`` runs them in order: ``formats`` has those that choose formats, ``transform`` those after the
choice. The stage of a package is its ``stage``, what it writes its ``record``:

    basis                      first, where formats are chosen in a basis
    profile                    what every format costs in every layer
    search, tune, allocate     the formats: by measured KL, by tasks, or by the profile within a budget
    reparam                    λ of keys (lambda_candidates)
    centre                     the mean of keys
    predictors                 keys and values from earlier layers
    basis, for feedback        what codes make good of their own errors (hessians)
    allocate.budget            compiles the plan
    evaluate, compare          texts and tasks through the plan's cache, next to bytes, of one plan or of all recipes

Without an artifact of a run: memory_needs (before), verify, check_damage (of a plan), generate (with it).
What stages share: passes over sequences that can be interrupted (checkpoint), KL (divergence), and bytes of
channels at more bits (tier_capacity).
"""
