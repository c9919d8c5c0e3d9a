"""The structure of the code base, held by tests: each rule of the design, with snippets that it must refuse."""
