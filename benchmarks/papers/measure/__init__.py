"""The studies: one module each, from targets, drafts and prompts of the lab to figures as JSON."""
