//! Texts that are compared with files; `DIVVY_BLESS=1` writes them.

use std::path::Path;

#[track_caller]
pub(crate) fn same(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(name);
    if std::env::var_os("DIVVY_BLESS").is_some() {
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(&path, format!("{text}\n")).unwrap();
    }
    assert_eq!(format!("{text}\n"), fs_err::read_to_string(path).unwrap());
}
