"""CP-SAT search over plain integers; never imports torch."""
