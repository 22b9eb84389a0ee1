"""CP-SAT search over plain integers; never imports torch.

problem      the three problems and their solutions: what callers build and read
frontier     level 1: Pareto points of one option per op        choice     one of them by CP-SAT
elimination  level 1: its steps, where few values cross         labels     all Pareto points by them
pipeline     level 2: cuts and options per block                partition, columns, stage: its parts
mesh         level 3: best-first branch and bound over settings    candidates what it knows of one
ahead        its next steps in forked processes                    forks      such processes
evaluate     the definitions: prices an answer, refuses a malformed problem
cp_sat       one call of the solver: statuses by name, deterministic, Ctrl-C heard
exhaustive, counting    references for tests
"""
