//! Texts that are compared with files; `DIVVY_BLESS=1` writes them.

use std::path::Path;

#[track_caller]
pub(crate) fn same(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(name);
    if std::env::var_os("DIVVY_BLESS").is_some() {
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        // At once: another test may read it to bring it into a document.
        let new = path.with_extension("new");
        fs_err::write(&new, format!("{text}\n")).unwrap();
        fs_err::rename(&new, &path).unwrap();
    }
    assert_eq!(format!("{text}\n"), fs_err::read_to_string(path).unwrap());
}
