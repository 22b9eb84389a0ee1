"""autoplan: module -> Trace -> Problem -> Solution -> Plan -> module."""
