"""CP-SAT search over plain integers; never imports torch.

problem      the three problems and their solutions: what callers build and read
choice       level 1: options per op under a memory limit       frontier   its Pareto points
pipeline     level 2: cuts and options per block                partition, columns, stage: its parts
mesh         level 3: best-first branch and bound over settings
evaluate     the definitions: prices an answer, refuses a malformed problem
cp_sat       one call of the solver: statuses by name, deterministic, Ctrl-C heard
exhaustive, counting    references for tests
"""
