"""Training steps of other frameworks, scalified: the pages of `docs/integrations` as programs."""
