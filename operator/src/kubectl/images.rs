//! New images for a group's containers, in whichever version the group is written.

use std::str::FromStr;

use serde_json::{Value, json};

use super::KubectlError;
use super::edit::{roles_mut, template_paths, text};

/// `[ROLE[/CONTAINER]=]IMAGE`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageAssignment {
    /// The role; `None`: all roles, where another tag of the same repository runs.
    pub role: Option<String>,
    /// The container; `None`: the role's only one, or those that run another tag of the same repository.
    pub container: Option<String>,
    /// The image.
    pub image: String,
}

impl FromStr for ImageAssignment {
    type Err = String;

    fn from_str(wish: &str) -> Result<Self, String> {
        let (target, image) = match wish.split_once('=') {
            Some((target, image)) => (Some(target), image),
            None => (None, wish),
        };
        let (role, container) = match target.map(|target| target.split_once('/').unwrap_or((target, ""))) {
            Some((role, container)) => (Some(role.to_owned()), Some(container.to_owned())),
            None => (None, None),
        };
        let is_slashed = target.is_some_and(|target| target.contains('/'));
        let container = container.filter(|_| is_slashed);
        let is_empty = |text: &Option<String>| text.as_ref().is_some_and(String::is_empty);
        if image.is_empty() || image.contains(char::is_whitespace) || is_empty(&role) || is_empty(&container)
        {
            return Err("it must read [ROLE[/CONTAINER]=]IMAGE".to_owned());
        }
        Ok(Self { role, container, image: image.to_owned() })
    }
}

/// Puts the images into the group.
///
/// # Errors
/// [`KubectlError::NoRole`], [`KubectlError::NoContainer`], [`KubectlError::WhichContainer`],
/// [`KubectlError::NoSuchRepository`].
pub fn set_images(group: &mut Value, wishes: &[ImageAssignment]) -> Result<(), KubectlError> {
    let templates = group["spec"]["roleTemplates"].clone();
    for wish in wishes {
        let mut found = false;
        for role in roles_mut(group, wish.role.as_slice())? {
            for container in matching_containers(role, &templates, wish)? {
                set_image(role, &templates, &container, &wish.image);
                found = true;
            }
        }
        if !found {
            let mut there: Vec<String> = Vec::new();
            for role in roles_mut(group, &[])? {
                there.extend(containers(role, &templates).into_iter().map(|(_, image)| image));
            }
            there.sort_unstable();
            there.dedup();
            return Err(KubectlError::NoSuchRepository { image: wish.image.clone(), there });
        }
    }
    Ok(())
}

/// The role's containers that the wish is about.
fn matching_containers(
    role: &Value,
    templates: &Value,
    wish: &ImageAssignment,
) -> Result<Vec<String>, KubectlError> {
    let all = containers(role, templates);
    let mut there: Vec<String> = all.iter().map(|(name, _)| name.clone()).collect();
    there.dedup();
    let of_same_repository = || {
        let same = all.iter().filter(|(_, image)| repository(image) == repository(&wish.image));
        let mut names: Vec<String> = same.map(|(name, _)| name.clone()).collect();
        names.dedup();
        names
    };
    match (&wish.role, &wish.container) {
        (Some(_), Some(name)) if there.contains(name) => Ok(vec![name.clone()]),
        (Some(role), Some(name)) => {
            Err(KubectlError::NoContainer { role: role.clone(), container: name.clone(), there })
        }
        (Some(_), None) if there.len() == 1 => Ok(there),
        (Some(role), None) => match of_same_repository() {
            none if none.is_empty() => {
                Err(KubectlError::WhichContainer { role: role.clone(), image: wish.image.clone(), there })
            }
            some => Ok(some),
        },
        (None, _) => Ok(of_same_repository()),
    }
}

/// Names and images of the role's containers, sorted by name. The same name may have several images.
pub(super) fn containers(role: &Value, templates: &Value) -> Vec<(String, String)> {
    let mut all = Vec::new();
    let mut take = |template: &Value| {
        for one in template["spec"]["containers"].as_array().into_iter().flatten() {
            if let (Some(name), Some(image)) = (one["name"].as_str(), one["image"].as_str()) {
                all.push((name.to_owned(), image.to_owned()));
            }
        }
    };
    template_paths(role).iter().filter_map(|path| role.pointer(path)).for_each(&mut take);
    let patched: Vec<String> = all.iter().map(|(name, _)| name.clone()).collect();
    let mut shared = Vec::new();
    for one in shared_template(role, templates)["spec"]["containers"].as_array().into_iter().flatten() {
        if let (Some(name), Some(image)) = (one["name"].as_str(), one["image"].as_str()) {
            shared.push((name.to_owned(), image.to_owned()));
        }
    }
    shared.retain(|(name, _)| !patched.contains(name));
    all.extend(shared);
    all.sort_unstable();
    all.dedup();
    all
}

/// The role template that the role refers to; null if it refers to none.
fn shared_template<'a>(role: &Value, templates: &'a Value) -> &'a Value {
    let name = reference(role).map(|(_, name)| name);
    let all = templates.as_array().into_iter().flatten();
    let mut found = all.filter(|one| name.is_some() && one["name"].as_str() == name.as_deref());
    found.next().map_or(&Value::Null, |one| &one["template"])
}

/// Where a role that refers to a role template has its patch of it, and the template's name.
pub(super) fn reference(role: &Value) -> Option<(String, String)> {
    let places = [
        ("/standalonePattern/templateRef", "/standalonePattern/templateRef/patch"),
        ("/leaderWorkerPattern/templateRef", "/leaderWorkerPattern/templateRef/patch"),
        ("/templateRef", "/templatePatch"),
    ];
    places.into_iter().find_map(|(reference, patch)| {
        let name = role.pointer(reference)?["name"].as_str()?;
        Some((patch.to_owned(), name.to_owned()))
    })
}

fn set_image(role: &mut Value, templates: &Value, container: &str, image: &str) {
    let has = |template: &Value| {
        let all = template["spec"]["containers"].as_array().into_iter().flatten();
        all.into_iter().any(|one| one["name"] == container && one["image"].is_string())
    };
    let mut in_patch = false;
    let reference = reference(role).map(|(patch, _)| patch);
    for path in template_paths(role) {
        let Some(template) = role.pointer_mut(&path) else { continue };
        let own = template["spec"]["containers"].as_array_mut().into_iter().flatten();
        for one in own.filter(|one| one["name"] == container && one["image"].is_string()) {
            one["image"] = image.into();
            in_patch |= reference.as_ref() == Some(&path);
        }
    }
    // What other roles share stays as it is: this role's patch names the image.
    if let Some(patch) = reference.filter(|_| !in_patch && has(shared_template(role, templates))) {
        let patch = super::edit::value_at_mut(role, &patch);
        if !patch["spec"]["containers"].is_array() {
            patch["spec"]["containers"] = json!([]);
        }
        let Value::Array(own) = &mut patch["spec"]["containers"] else { return };
        match own.iter_mut().find(|one| one["name"] == container) {
            Some(one) => one["image"] = image.into(),
            None => own.push(json!({ "name": container, "image": image })),
        }
    }
}

/// An image without tag and digest.
pub(super) fn repository(image: &str) -> &str {
    let image = image.split('@').next().unwrap_or(image);
    let name = image.rfind('/').map_or(0, |slash| slash + 1);
    match image.get(name..).and_then(|last| last.find(':')) {
        Some(colon) => image.get(..name + colon).unwrap_or(image),
        None => image,
    }
}

/// Images of all containers of a group's role, for people.
pub(super) fn images(role: &Value, templates: &Value) -> Vec<String> {
    let mut images: Vec<String> = containers(role, templates).into_iter().map(|(_, image)| image).collect();
    images.sort_unstable();
    images.dedup();
    images
}

/// The name of a role.
pub(super) fn name_of(role: &Value) -> String {
    text(&role["name"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wish_names_role_and_container_or_not() {
        let parse = |text: &str| {
            let wish: ImageAssignment = text.parse().unwrap();
            (wish.role.unwrap_or_default(), wish.container.unwrap_or_default(), wish.image)
        };
        let expected =
            |role: &str, container: &str, image: &str| (role.into(), container.into(), image.into());
        assert_eq!(parse("a/b:1"), expected("", "", "a/b:1"));
        assert_eq!(parse("r=a/b:1"), expected("r", "", "a/b:1"));
        assert_eq!(parse("r/c=host:5000/a@sha256:0"), expected("r", "c", "host:5000/a@sha256:0"));
        for wrong in ["", "=a", "r=", "r/=a", "/c=a", "r=a b"] {
            assert!(wrong.parse::<ImageAssignment>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_repository_is_an_image_without_tag_and_digest() {
        let cases =
            [("a/b:1", "a/b"), ("host:5000/b", "host:5000/b"), ("b", "b"), ("h:1/b:2@sha256:0", "h:1/b")];
        for (image, expected) in cases {
            assert_eq!(repository(image), expected);
        }
    }
}
