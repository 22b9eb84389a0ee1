"""What we claim about speed and accuracy; each module is a command that prints its table."""
