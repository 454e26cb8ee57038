//! Each link of a page of the repository leads to a file and a heading that exist. Links to other hosts are not
//! followed.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

/// Collects the pages of this folder and of the folders in it, without builds and hidden folders.
fn pages(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            pages(&path, found);
        } else if path.extension().is_some_and(|it| it == "md") {
            found.push(path);
        }
    }
}

/// The links and the anchors of a page.
fn read(page: &Path) -> (BTreeSet<String>, BTreeSet<String>) {
    let (mut links, mut anchors, mut heading) = (BTreeSet::new(), BTreeSet::new(), None);
    let text = fs::read_to_string(page).unwrap();
    let undefined = &mut |link: pulldown_cmark::BrokenLink<'_>| {
        let is_page = link.reference.starts_with("page:");
        is_page.then(|| (format!("undefined {}", link.reference).into(), "".into()))
    };
    let options = Options::ENABLE_TABLES | Options::ENABLE_TASKLISTS;
    for event in Parser::new_with_broken_link_callback(&text, options, Some(undefined)) {
        match event {
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                links.insert(dest_url.into_string());
            }
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::End(TagEnd::Heading(_)) => anchors.extend(heading.take().map(|it| anchor(&it))),
            Event::Text(text) | Event::Code(text) => {
                heading.iter_mut().for_each(|heading| heading.push_str(&text));
            }
            _ => {}
        }
    }
    (links, anchors)
}

/// The anchor of a heading, as code hosts and rustdoc make it.
fn anchor(heading: &str) -> String {
    let kept = heading.to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[test]
fn each_link_leads_somewhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut all, mut torn) = (Vec::new(), Vec::new());
    pages(root, &mut all);
    // The text behind docs/evidence/benchmarks.md: its links begin there.
    all.retain(|page| !page.ends_with("bench/page.md"));
    for page in all {
        for link in read(&page).0 {
            let (file, fragment) = link.split_once('#').unwrap_or((&link, ""));
            if file.contains("://") || file.starts_with("mailto:") || file.starts_with("crate::") {
                continue;
            }
            let target = match file {
                "" => page.clone(),
                file => page.parent().unwrap().join(file),
            };
            let leads = target.exists()
                && (fragment.is_empty()
                    || target.extension().is_none_or(|it| it != "md")
                    || read(&target).1.contains(fragment));
            if !leads {
                torn.push(format!("{}: {link}", page.strip_prefix(root).unwrap().display()));
            }
        }
    }
    assert!(torn.is_empty(), "{}", torn.join("\n"));
}

/// On docs.rs a page is a module. A link without an address there would lead to a file, and docs.rs has no files.
#[test]
fn each_link_of_the_guide_has_an_address_on_the_documentation_of_the_crate() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let defined = |text: &str| -> BTreeSet<String> {
        let lines = text.lines().filter(|it| it.starts_with("[page:"));
        lines.filter_map(|it| Some(it.split_once("]: ")?.0.to_owned())).collect()
    };
    let addresses = defined(&fs::read_to_string(root.join("src/guide/links.md")).unwrap());
    let mut pages: Vec<_> =
        fs::read_dir(root.join("docs")).unwrap().map(|it| it.unwrap().path()).collect();
    pages.retain(|it| it.extension().is_some_and(|it| it == "md"));
    let used: BTreeSet<_> =
        pages.iter().flat_map(|it| defined(&fs::read_to_string(it).unwrap())).collect();
    let missing: Vec<_> = used.difference(&addresses).collect();
    assert!(pages.len() > 10 && missing.is_empty(), "{missing:?}");
}

#[test]
fn each_limit_of_the_architecture_is_that_of_the_code() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap();
    let (_, limits) = page.split_once("## Limits").unwrap();
    let rows = limits.lines().filter(|it| it.starts_with('|')).skip(2);
    let mut checked = 0;
    for row in rows {
        let [_, constant, _, file, _] = row.split('`').collect::<Vec<_>>()[..] else {
            panic!("{row}")
        };
        let (name, value) = match constant.split_once(" = ") {
            Some((name, value)) => (name, value.to_owned()),
            None => {
                let (name, seconds) = constant.split_once(": ").unwrap();
                (name, format!("Duration::from_secs({})", seconds.strip_suffix(" s").unwrap()))
            }
        };
        let code = fs::read_to_string(root.join(file)).unwrap();
        let is_it = |line: &str| {
            line.contains(&format!("const {name}: ")) && line.ends_with(&format!(" = {value};"))
        };
        assert!(code.lines().any(is_it), "{row}");
        checked += 1;
    }
    assert!(checked >= 20, "{checked}");
}
