"""perfexp: how fast a model trains and infers, at what cost, and how sure that is."""
