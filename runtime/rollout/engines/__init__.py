"""One file per engine kind; a file name is `rollout.engine` in a config."""
