//! What users write: opaque device configs, names, strict decoding, defaults and validation.
