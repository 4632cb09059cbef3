"""The stages of a run, each from artifacts to an artifact, and what else is measured or told of a model and
its plans.

``pipeline`` runs them in order: ``formats`` has those that choose formats, ``transform`` those after the
choice. The stage of a package is its ``stage``, what it writes its ``record``:

    basis                      first, where formats are chosen in a basis              (kvcal.systems.basis)
    profile                    what every format costs in every layer
    search, tune, allocate     the formats: by measured KL, by tasks, or by the profile within a budget
    reparam                    λ of keys                                               (kvcal.systems.pm_kvq)
    centre                     the mean of keys                                        (kvcal.systems.basis)
    …                          other transforms of systems: those that have a stage.py
    basis, for feedback        what codes make good of their own errors                (kvcal.systems.basis)
    allocate.budget            compiles the plan
    evaluate, compare          texts and tasks through the plan's cache, next to bytes, of one plan or of all recipes

Without an artifact of a run: memory_needs (before), verify, check_damage (of a plan), generate (with it).
What stages share: passes over sequences that can be interrupted (checkpoint), far positions (calibration),
and KL (divergence).
"""
