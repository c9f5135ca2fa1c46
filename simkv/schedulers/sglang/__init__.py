"""SGLang: its rules, and its policies as variants."""
