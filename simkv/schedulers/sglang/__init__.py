"""SGLang: its scheduling rules, with releases and pull requests as variants."""
