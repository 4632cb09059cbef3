"""Systems, each in a folder of its own: what it adds to recipes, plans, pages and stages.

    basis     rotated pages in a basis of each head, with error feedback; means of keys        (the default recipe)
    kitty     tiers: channels of keys that get more bits, by a score                           (Kitty)
    mixkvq    tiers by scores of queries, whose rooms are fitted                               (MixKVQ)
    pm_kvq    pages that shrink on a schedule, and λ, which evens out key channels             (PM-KVQ)
    aqua_kv   pages that hold what a prediction from an earlier layer leaves; HIGGS's lattices (AQUA-KV)
    kvmix     bits and windows by importance of layers                                         (KVmix)

What several systems share stands in ``kvcal.pages`` and ``kvcal.plan``.
"""
