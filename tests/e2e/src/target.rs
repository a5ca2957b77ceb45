//! The architectures that divvy is shipped for: how programs are built for one on a machine of
//! another, and which libraries those link.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use fs_err as fs;

use crate::process::{output, run};
use crate::programs::workspace;

/// An architecture, with glibc or, for static programs, musl.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// Name that Rust and GNU use.
    pub name: &'static str,
    /// Name that OCI uses.
    pub oci: &'static str,
}

impl Target {
    pub const AMD64: Self = Self {
        name: "x86_64",
        oci: "amd64",
    };
    pub const ARM64: Self = Self {
        name: "aarch64",
        oci: "arm64",
    };
    /// Targets that divvy is shipped for.
    pub const ALL: [Self; 2] = [Self::AMD64, Self::ARM64];
    /// Target of this machine.
    pub const HOST: Self = if cfg!(target_arch = "aarch64") {
        Self::ARM64
    } else {
        Self::AMD64
    };

    pub fn gnu(self) -> String {
        format!("{}-unknown-linux-gnu", self.name)
    }

    pub fn musl(self) -> String {
        format!("{}-unknown-linux-musl", self.name)
    }

    /// GNU's compiler for it. It links with either libc: Rust brings musl along.
    fn gcc(self) -> String {
        if self == Self::HOST {
            "gcc".to_owned()
        } else {
            format!("{}-linux-gnu-gcc", self.name)
        }
    }

    /// Runs `cargo build` with its compiler for what is in C, and for linking.
    pub(crate) fn build(self, args: &[&str]) -> Result<()> {
        let mut cargo = Command::new("cargo");
        cargo
            .args(["build", "--locked"])
            .args(args)
            .current_dir(workspace());
        // `cargo run` sets it, and crates that look at it would be built again by each that builds
        // without.
        cargo.env_remove("CARGO_MANIFEST_DIR");
        let musl = self.musl().replace('-', "_");
        cargo.env(format!("CC_{musl}"), self.gcc());
        // Some distributions' compilers call functions that only glibc has.
        cargo.env(format!("CFLAGS_{musl}"), "-U_FORTIFY_SOURCE");
        // Nothing is set for this machine's programs: what else builds them would do that again.
        if self != Self::HOST {
            cargo.env(format!("CC_{}", self.gnu().replace('-', "_")), self.gcc());
            for triple in [self.gnu(), self.musl()] {
                let name = triple.replace('-', "_").to_uppercase();
                cargo.env(format!("CARGO_TARGET_{name}_LINKER"), self.gcc());
            }
        }
        run(&mut cargo)
    }

    /// The libraries that the loader needs to start a program, itself included, by the path that it
    /// looks for them at; none for a static program.
    pub(crate) fn libraries(self, program: &Path) -> Result<BTreeMap<String, PathBuf>> {
        let mut found = BTreeMap::new();
        let mut unread = vec![program.to_owned()];
        while let Some(file) = unread.pop() {
            for needed in needed(&output(Command::new("readelf").arg("-dlW").arg(&file))?) {
                let name = needed.rsplit('/').next().unwrap_or(needed);
                if found.contains_key(name) {
                    continue;
                }
                let source = self.library(name)?;
                let path = if needed == name {
                    self.path_of(&source)?
                } else {
                    needed.to_owned()
                };
                found.insert(name.to_owned(), (path, source.clone()));
                unread.push(source);
            }
        }
        Ok(found.into_values().collect())
    }

    /// A library of the compiler's.
    pub(crate) fn library(self, name: &str) -> Result<PathBuf> {
        let said = output(Command::new(self.gcc()).arg(format!("-print-file-name={name}")))?;
        let path = Path::new(said.trim());
        ensure!(path.is_absolute(), "{} has no library {name}", self.gcc());
        Ok(fs::canonicalize(path.parent().unwrap_or(path))?.join(name))
    }

    /// Where the loader looks for a library: where it is here, unless the compiler is for other
    /// machines.
    pub(crate) fn path_of(self, library: &Path) -> Result<String> {
        if self == Self::HOST {
            return Ok(library.display().to_string());
        }
        let name = library.file_name().context("a library without a name")?;
        Ok(format!(
            "/usr/lib/{}-linux-gnu/{}",
            self.name,
            name.display()
        ))
    }
}

/// Returns what a program needs, by readelf's words: first the path of its loader, then libraries.
fn needed(text: &str) -> Vec<&str> {
    let value = |line| {
        let keys = ["program interpreter: ", "Shared library: ["];
        keys.iter()
            .find_map(|key| str::split_once(line, key)?.1.strip_suffix(']'))
    };
    text.lines().filter_map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::{Target, needed};

    #[test]
    fn the_loader_and_every_library_are_read() {
        let text = "  INTERP  0x1 R 0x1\n      [Requesting program interpreter: /lib64/ld-linux-x86-64.so.2]\n \
                    0x01 (NEEDED)             Shared library: [libgcc_s.so.1]\n \
                    0x01 (NEEDED)             Shared library: [ld-linux-x86-64.so.2]\n 0x0c (INIT) 0x1000\n";
        assert_eq!(
            needed(text),
            [
                "/lib64/ld-linux-x86-64.so.2",
                "libgcc_s.so.1",
                "ld-linux-x86-64.so.2"
            ]
        );
        assert!(needed("There is no dynamic section in this file.\n").is_empty());
    }

    #[test]
    fn a_program_of_this_machine_needs_its_loader_at_one_path_and_libc() {
        let this = std::env::current_exe().unwrap();
        let found = Target::HOST.libraries(&this).unwrap();
        let paths = |part: &str| found.keys().filter(|path| path.contains(part)).count();
        assert_eq!(
            (paths("/ld-linux"), paths("/libc.so.6")),
            (1, 1),
            "{found:?}"
        );
        assert!(
            Target::HOST
                .library("libnone.so.1")
                .unwrap_err()
                .to_string()
                .contains("no library libnone.so.1")
        );
    }
}
