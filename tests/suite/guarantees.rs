//! The page that names the tests of each guarantee is correct.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Collects all Rust files of the project in these folders.
fn sources(folder: &Path, text: &mut String) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, text);
        } else if path.extension().is_some_and(|it| it == "rs") {
            text.push_str(&fs::read_to_string(&path).unwrap());
        }
    }
}

#[test]
fn each_guarantee_names_tests_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("docs/evidence/tests.md")).unwrap();
    let mut code = String::new();
    for folder in ["tests", "src", "crates"] {
        sources(&root.join(folder), &mut code);
    }
    let rows = page.lines().filter(|line| line.starts_with("| ")).skip(1);
    let mut bugs_named = BTreeSet::new();
    for row in rows {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        let names = |cell: &str| -> Vec<String> {
            cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
        };
        let (tests, bugs) = (names(cells[2]), names(cells[3]));
        assert!(!tests.is_empty(), "{row}");
        for test in tests {
            let is_there = ["(", "<"].iter().any(|end| code.contains(&format!("fn {test}{end}")));
            assert!(is_there, "no such test: {test}");
        }
        bugs_named.extend(bugs);
    }
    let bugs: BTreeSet<_> = fs::read_dir(root.join("tests/faults/bugs"))
        .unwrap()
        .map(|entry| entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    assert_eq!(bugs_named, bugs, "each seeded bug is listed with its guarantee");
}
